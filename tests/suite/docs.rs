//! Every public item has an example that runs.
//!
//! Read from the sources as text, as rustfmt lays them out: an item of a module begins in the first column, one of an
//! `impl` or a trait in the fifth. A type, a trait, a constant or a function has an example in its own docs. A method is
//! called there, in the docs of its type or of another method, or in any other example that names its type.

use std::{fs, path::Path};

/// What a line of the sources declares, and the code that its docs show and run.
struct Item {
    reference: bool,
    /// The type or trait of a method, and whether it is a trait.
    owner: String,
    of_trait: bool,
    name: String,
    public: bool,
    examples: Vec<String>,
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The first word of `text`.
fn word(text: &str) -> String {
    text.chars().take_while(|&c| is_word(c)).collect()
}

/// Whether `code` has `name` as a word that `fits` what stands before and behind it.
fn has(code: &str, name: &str, fits: impl Fn(&str, &str) -> bool) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let (head, tail) = (&code[..at], &code[at + name.len()..]);
        !head.ends_with(is_word) && !tail.starts_with(is_word) && fits(head, tail)
    })
}

/// The blocks of a Markdown text that run, without comments and without the lines that readers do not see.
fn examples(text: &str) -> Vec<String> {
    let blocks = text
        .split("```")
        .skip(1)
        .step_by(2)
        .filter_map(|block| block.split_once('\n'));
    let running = blocks.filter(|(kind, _)| matches!(*kind, "" | "rust"));
    let seen = |line: &&str| !line.trim_start().starts_with("# ");
    let code = |line: &str| format!("{}\n", line.split("//").next().unwrap());
    running
        .map(|(_, lines)| lines.lines().filter(seen).map(code).collect())
        .collect()
}

fn items(source: &str, reference: bool) -> Vec<Item> {
    let (mut items, mut docs, mut hidden) = (vec![], String::new(), false);
    let (mut owner, mut of_trait) = (String::new(), false);
    for line in source.lines() {
        let text = line.trim_start();
        if let Some(doc) = text.strip_prefix("///").or(text.strip_prefix("//!")) {
            docs.extend([doc, "\n"]);
            continue;
        }
        if text.starts_with("#[") {
            hidden |= text == "#[doc(hidden)]";
            continue;
        }
        let indent = line.len() - text.len();
        let declared = text.strip_prefix("pub ");
        let public = declared.is_some() || of_trait && indent == 4;
        let mut declared = declared.unwrap_or(text);
        for qualifier in ["const fn ", "async fn ", "unsafe fn "] {
            declared = declared
                .strip_prefix(qualifier)
                .map_or(declared, |_| &declared[qualifier.len() - 3..]);
        }
        let (keyword, rest) = declared.split_once(' ').unwrap_or((declared, ""));
        let item = ["struct", "enum", "trait", "type", "const", "fn"].contains(&keyword);
        let reachable = indent == 0 || indent == 4 && !owner.is_empty();
        items.push(Item {
            reference,
            owner: owner.clone(),
            of_trait,
            name: word(rest),
            public: item && public && reachable && !hidden,
            examples: examples(&docs),
        });
        (docs, hidden) = (String::new(), false);
        if line == "}" {
            (owner, of_trait) = (String::new(), false);
        } else if indent == 0 && keyword == "trait" {
            (owner, of_trait) = (word(rest), true);
        } else if line.starts_with("impl<") && !line.contains(" for ") {
            owner = word(line.split_once("> ").map_or("", |(_, target)| target));
        } else if line.starts_with("impl ") && !line.contains(" for ") {
            owner = word(rest);
        }
    }
    items
}

/// The items of all files under `path`; what is no source has examples alone.
fn walk(path: &Path) -> Vec<Item> {
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap();
        return entries.flat_map(|entry| walk(&entry.unwrap().path())).collect();
    }
    let text = fs::read_to_string(path).unwrap();
    if path.extension().is_some_and(|extension| extension == "rs") {
        return items(&text, path.to_string_lossy().contains("reference"));
    }
    let mut items = items("page", false);
    items[0].examples = examples(&text);
    items
}

/// Whether an example in the docs of `other` shows `item`.
fn shows(other: &Item, item: &Item) -> bool {
    if item.owner.is_empty() {
        return std::ptr::eq(other, item) && !item.examples.is_empty();
    }
    let of_type = if other.owner.is_empty() {
        &other.name
    } else {
        &other.owner
    };
    let beside = other.reference == item.reference && *of_type == item.owner;
    let type_path = format!("{}::", item.owner);
    let calls = |head: &str, tail: &str| {
        head.ends_with('.') && (tail.starts_with('(') || tail.starts_with("::<"))
            || head.ends_with(&type_path)
            || item.of_trait && head.ends_with("::")
    };
    other.examples.iter().any(|code| {
        let module = if item.reference {
            code.contains("reference")
        } else {
            !other.reference
        };
        (beside || module && has(code, &item.owner, |_, _| true)) && has(code, &item.name, calls)
    })
}

#[test]
fn every_public_item_has_an_example_that_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found: Vec<Item> = ["src", "docs", "README.md"]
        .iter()
        .flat_map(|path| walk(&root.join(path)))
        .collect();
    let public: Vec<&Item> = found.iter().filter(|item| item.public).collect();
    assert!(
        public.len() > 250,
        "only {} public items were found",
        public.len()
    );
    let lacking = public
        .iter()
        .filter(|item| !found.iter().any(|other| shows(other, item)));
    let mut names: Vec<String> = lacking
        .map(|item| format!("{} {}", item.owner, item.name))
        .collect();
    // Builds and runs every variant, which takes minutes: its example is only compiled.
    names.retain(|name| name != "Gpu self_check");
    assert!(
        names.is_empty(),
        "no example runs for {} of {}: {names:#?}",
        names.len(),
        public.len()
    );
}
