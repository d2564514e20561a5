//! Finding case files, and writing what was computed.

use super::case::{Answer, Answers};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders inside folders are followed this far.
const MAX_DEPTH: usize = 32;

const EXTENSION: &str = "safetensors";

/// A file to run, or a path that is none.
#[derive(Debug, Clone)]
pub(crate) struct Input {
    pub(crate) path: PathBuf,
    /// What the report calls it: folder and name.
    pub(crate) label: String,
    /// Where its answers go below `--out`.
    pub(crate) out: PathBuf,
    /// Why there is nothing to run.
    pub(crate) problem: Option<String>,
}

/// Files as given, and those in the given folders, sorted.
pub(crate) fn collect(paths: &[PathBuf]) -> Vec<Input> {
    let mut inputs = Vec::new();
    for path in paths {
        if !path.is_dir() {
            let stem = PathBuf::from(path.file_name().unwrap_or(path.as_os_str()));
            inputs.push(Input {
                label: label(path, &stem),
                path: path.clone(),
                out: stem,
                problem: None,
            });
            continue;
        }
        let mut found = Vec::new();
        let problem = walk(path, &mut found, 0).err().or_else(|| {
            found
                .is_empty()
                .then(|| format!("has no .{EXTENSION} file in it"))
        });
        found.sort();
        if let Some(problem) = problem {
            inputs.push(Input {
                label: path.display().to_string(),
                path: path.clone(),
                out: PathBuf::new(),
                problem: Some(problem),
            });
        }
        inputs.extend(found.into_iter().map(|file| {
            let below = file.strip_prefix(path).unwrap_or(&file).to_path_buf();
            Input {
                label: label(&file, &below),
                out: below,
                path: file,
                problem: None,
            }
        }));
    }
    inputs
}

/// At least the file's own folder, without the extension.
fn label(file: &Path, below: &Path) -> String {
    let parent = file.parent().and_then(Path::file_name).map(PathBuf::from);
    let shown = match parent {
        Some(parent) if below.components().count() == 1 => parent.join(below),
        _ => below.to_path_buf(),
    };
    let text = shown.display().to_string();
    text.strip_suffix(&format!(".{EXTENSION}"))
        .map_or(text.clone(), str::to_owned)
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>, depth: usize) -> Result<(), String> {
    let told = |error: std::io::Error| format!("{} cannot be read: {error}", folder.display());
    for entry in fs::read_dir(folder).map_err(told)? {
        let entry = entry.map_err(told)?;
        let path = entry.path();
        // A link to a folder is not followed, so that a loop ends.
        if entry.file_type().map_err(told)?.is_dir() {
            if depth < MAX_DEPTH {
                walk(&path, found, depth + 1)?;
            }
        } else if path.extension().is_some_and(|extension| extension == EXTENSION) {
            found.push(path);
        }
    }
    Ok(())
}

/// Writes answers below a folder, never over an input and never twice under one name.
pub(crate) struct Writer<'a> {
    folder: Option<&'a Path>,
    inputs: BTreeSet<PathBuf>,
    written: BTreeSet<PathBuf>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(folder: Option<&'a Path>, inputs: &[Input]) -> Self {
        let inputs = match folder {
            Some(_) => inputs
                .iter()
                .filter_map(|input| fs::canonicalize(&input.path).ok())
                .collect(),
            None => BTreeSet::new(),
        };
        Self {
            folder,
            inputs,
            written: BTreeSet::new(),
        }
    }

    /// One file of F32 tensors, named as in the case.
    pub(crate) fn write(&mut self, input: &Input, answers: &Answers) -> Result<(), String> {
        let Some(folder) = self.folder else { return Ok(()) };
        let path = folder.join(&input.out).with_extension(EXTENSION);
        let told = |error: &dyn std::fmt::Display| format!("{} cannot be written: {error}", path.display());
        if fs::canonicalize(&path).is_ok_and(|path| self.inputs.contains(&path)) {
            return Err(told(&"it is one of the case files"));
        }
        if !self.written.insert(path.clone()) {
            return Err(told(&"another case of this run has the same name"));
        }
        let bytes: Vec<(&str, &Answer, Vec<u8>)> = answers
            .iter()
            .map(|(name, answer)| {
                let bytes = answer
                    .data
                    .iter()
                    .flat_map(|&x| (x as f32).to_le_bytes())
                    .collect();
                (*name, answer, bytes)
            })
            .collect();
        let views = bytes
            .iter()
            .map(|(name, answer, bytes)| {
                TensorView::new(Dtype::F32, answer.shape.clone(), bytes).map(|view| (*name, view))
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| told(&error))?;
        let file = safetensors::serialize(views, None).map_err(|error| told(&error))?;
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|error| told(&error))?;
        }
        fs::write(&path, file).map_err(|error| told(&error))
    }
}
