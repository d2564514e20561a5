//! Time and memory against length, on logarithmic axes.

use std::collections::BTreeMap;
use std::path::Path;

use super::report::{Report, Row};
use plotters::coord::Shift;
use plotters::coord::combinators::IntoLogRange;
use plotters::prelude::*;

type Failure = Box<dyn std::error::Error>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1240, 640);

/// Width of the legend.
const LEGEND: i32 = 170;

/// How a line looks: paths and batches differ in colour (Okabe and Ito's, which stay apart for most colour-blind
/// readers), f16 is hollow, causal order has triangles, or crosses in f16.
#[derive(Clone, Copy)]
struct Look {
    line: ShapeStyle,
    mark: ShapeStyle,
    shape: Shape,
}

#[derive(Clone, Copy)]
enum Shape {
    Circle,
    Triangle,
    Cross,
}

impl Look {
    fn new(series: &str) -> Self {
        let colour = match series {
            _ if series.contains("window") => RGBColor(86, 180, 233),
            _ if series.starts_with("fused") => RGBColor(0, 114, 178),
            _ if series.starts_with("composed") => RGBColor(213, 94, 0),
            _ if series.contains("B16") => RGBColor(204, 121, 167),
            _ => RGBColor(0, 158, 115),
        };
        let line = colour.stroke_width(2);
        Self {
            line,
            mark: if series.contains("f16") {
                line
            } else {
                colour.filled()
            },
            shape: match (series.contains("causal"), series.contains("f16")) {
                (false, _) => Shape::Circle,
                (true, false) => Shape::Triangle,
                (true, true) => Shape::Cross,
            },
        }
    }
}

/// Writes the chart of a run, if it holds anything that depends on a length.
pub(crate) fn write(report: &Report, path: &Path) -> Result<(), Failure> {
    let mut series: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in &report.rows {
        if let Some(name) = &row.series {
            series.entry(name).or_default().push(row);
        }
    }
    if series.is_empty() {
        return Err("no workload that was measured belongs to a line of the chart".into());
    }
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("multihead {} on {}", report.version, report.adapter);
    let root = root.titled(&title, ("sans-serif", 17))?;
    let (panels, legend) = root.split_horizontally(SIZE.0 as i32 - LEGEND);
    let (left, right) = panels.split_horizontally((SIZE.0 as i32 - LEGEND) / 2);
    panel(&left, &series, "time of a call, ms", |row| row.median_ms)?;
    panel(&right, &series, "peak memory, MiB", |row| {
        row.peak_bytes as f64 / f64::from(1 << 20)
    })?;
    for (place, name) in series.keys().enumerate() {
        let look = Look::new(name);
        let height = 30 + 22 * place as i32;
        legend.draw(&PathElement::new([(4, height), (32, height)], look.line))?;
        let at = (18, height);
        match look.shape {
            Shape::Circle => legend.draw(&Circle::new(at, 4, look.mark))?,
            Shape::Triangle => legend.draw(&TriangleMarker::new(at, 6, look.mark))?,
            Shape::Cross => legend.draw(&Cross::new(at, 4, look.mark))?,
        }
        legend.draw(&Text::new(*name, (40, height - 7), ("sans-serif", 13)))?;
    }
    root.present()?;
    Ok(())
}

fn panel(
    area: &Area,
    series: &BTreeMap<&str, Vec<&Row>>,
    what: &str,
    value: impl Fn(&Row) -> f64,
) -> Result<(), Failure> {
    let rows = || series.values().flatten();
    let lengths = || rows().filter_map(|row| row.length).map(|length| length as f64);
    let around = |values: &mut dyn Iterator<Item = f64>| {
        let (low, high) = values.fold((f64::INFINITY, 0f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        low / 1.3..high * 1.3
    };
    let across = around(&mut lengths());
    let up = around(&mut rows().map(|row| value(row)));
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(across.log_scale().base(2.0), up.log_scale())?;
    chart
        .configure_mesh()
        .x_desc("length (decoding: keys)")
        .y_desc(what)
        .label_style(("sans-serif", 14))
        .x_label_formatter(&|length| format!("{length:.0}"))
        .y_label_formatter(&number)
        .light_line_style(WHITE)
        .draw()?;
    for (name, rows) in series {
        let look = Look::new(name);
        let mut points: Vec<(f64, f64)> = rows
            .iter()
            .filter_map(|row| Some((row.length? as f64, value(row))))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart.draw_series(LineSeries::new(points.clone(), look.line))?;
        let points = points.into_iter();
        match look.shape {
            Shape::Circle => {
                chart.draw_series(points.map(|at| Circle::new(at, 4, look.mark)))?;
            }
            Shape::Triangle => {
                chart.draw_series(points.map(|at| TriangleMarker::new(at, 6, look.mark)))?;
            }
            Shape::Cross => {
                chart.draw_series(points.map(|at| Cross::new(at, 4, look.mark)))?;
            }
        }
    }
    Ok(())
}

/// Without the digits that a power of ten does not need.
fn number(value: &f64) -> String {
    if *value >= 1.0 {
        format!("{value:.0}")
    } else {
        format!("{value}")
    }
}
