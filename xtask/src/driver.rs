//! Sees to it that a Vulkan driver is there. wgpu has its own backends elsewhere; on Linux it needs
//! the Vulkan loader (`libvulkan.so.1`) and one driver, which a JSON file announces. Where there is
//! no GPU, Mesa's lavapipe computes on the CPU.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

const DRIVER_VARIABLES: [&str; 2] = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];

const DRIVER_FOLDERS: [&str; 4] = [
    "/usr/share/vulkan/icd.d",
    "/etc/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
    "/run/opengl-driver/share/vulkan/icd.d",
];

const LIBRARY_FOLDERS: [&str; 5] = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64"];

const ADVICE: &str = "install the Vulkan loader (libvulkan.so.1) and a driver, \
                      such as Mesa's lavapipe, with your system's package manager";

/// Where the loader and the drivers may lie.
#[derive(Debug, Default)]
struct Places {
    /// A driver that the environment names: taken as it is.
    named: bool,
    driver_folders: Vec<PathBuf>,
    library_folders: Vec<PathBuf>,
}

impl Places {
    fn of_this_system() -> Self {
        let named = DRIVER_VARIABLES
            .iter()
            .any(|name| env::var_os(name).is_some_and(|value| !value.is_empty()));
        let mut driver_folders: Vec<PathBuf> = DRIVER_FOLDERS.iter().map(PathBuf::from).collect();
        if let Some(home) = env::var_os("HOME") {
            driver_folders.push(PathBuf::from(home).join(".local/share/vulkan/icd.d"));
        }
        let mut library_folders: Vec<PathBuf> = LIBRARY_FOLDERS.iter().map(PathBuf::from).collect();
        if let Some(paths) = env::var_os("LD_LIBRARY_PATH") {
            library_folders.extend(env::split_paths(&paths).filter(|path| path.is_absolute()));
        }
        Self {
            named,
            driver_folders,
            library_folders,
        }
    }

    fn has_driver(&self) -> bool {
        self.named || self.driver_folders.iter().any(|folder| has_json(folder))
    }

    fn has_loader(&self) -> bool {
        self.library_folders
            .iter()
            .any(|folder| has_library(folder, "libvulkan.so.1"))
    }

    /// What is missing, in words.
    fn missing(&self) -> Option<&'static str> {
        match (self.has_loader(), self.has_driver()) {
            (true, true) => None,
            (true, false) => Some("no Vulkan driver"),
            (false, true) => Some("no Vulkan loader"),
            (false, false) => Some("no Vulkan loader and no driver"),
        }
    }
}

fn has_json(folder: &Path) -> bool {
    entries(folder).any(|path| path.is_file() && path.extension() == Some(OsStr::new("json")))
}

/// Whether the library lies in the folder or in its folder for one architecture.
fn has_library(folder: &Path, name: &str) -> bool {
    folder.join(name).exists()
        || entries(folder).any(|path| {
            let architecture = path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().contains("-linux-"));
            architecture && path.join(name).exists()
        })
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

/// The file of an executable, if one of the folders in `path` has it.
pub fn on_path(name: &str, path: &OsStr) -> Option<PathBuf> {
    let file = format!("{name}{}", env::consts::EXE_SUFFIX);
    env::split_paths(path)
        .map(|folder| folder.join(&file))
        .find(|file| file.is_file())
}

/// A package manager and what to say to it.
#[derive(Debug)]
struct Manager {
    name: &'static str,
    /// Commands that may fail, such as refreshing the lists when one source is down.
    before: &'static [&'static [&'static str]],
    install: &'static [&'static str],
}

const MANAGERS: [Manager; 5] = [
    Manager {
        name: "apt-get",
        before: &[&["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "update"]],
        install: &[
            "env",
            "DEBIAN_FRONTEND=noninteractive",
            "apt-get",
            "install",
            "-y",
            "--no-install-recommends",
            "mesa-vulkan-drivers",
            "libvulkan1",
        ],
    },
    Manager {
        name: "dnf",
        before: &[],
        install: &["dnf", "install", "-y", "mesa-vulkan-drivers", "vulkan-loader"],
    },
    Manager {
        name: "pacman",
        before: &[],
        install: &[
            "pacman",
            "-Sy",
            "--noconfirm",
            "--needed",
            "vulkan-swrast",
            "vulkan-icd-loader",
        ],
    },
    Manager {
        name: "zypper",
        before: &[],
        install: &[
            "zypper",
            "--non-interactive",
            "install",
            "libvulkan_lvp",
            "libvulkan1",
        ],
    },
    Manager {
        name: "apk",
        before: &[],
        install: &[
            "apk",
            "add",
            "--update-cache",
            "mesa-vulkan-swrast",
            "vulkan-loader",
        ],
    },
];

impl Manager {
    fn find(path: &OsStr) -> Option<&'static Self> {
        MANAGERS
            .iter()
            .find(|manager| on_path(manager.name, path).is_some())
    }
}

/// The command with `sudo -n` (asks no password) before it where that is needed.
fn elevated(command: &[&'static str], sudo: bool) -> Vec<&'static str> {
    let prefix: &[&str] = if sudo { &["sudo", "-n"] } else { &[] };
    [prefix, command].concat()
}

/// Makes sure of a Vulkan driver; installs one if it is missing and `install` allows it.
pub fn ensure(install: bool) -> Result<()> {
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    let Some(missing) = Places::of_this_system().missing() else {
        return Ok(());
    };
    let path = env::var_os("PATH").unwrap_or_default();
    let Some(manager) = Manager::find(&path) else {
        bail!("{missing} found, and no package manager that I know: {ADVICE}");
    };
    let root = is_root();
    let by_hand = elevated(manager.install, !root)
        .join(" ")
        .replace("sudo -n", "sudo");
    if !install {
        bail!("{missing} found, and --no-install forbids installing one; to do it yourself: {by_hand}");
    }
    let sudo = !root && on_path("sudo", &path).is_some();
    eprintln!(
        "xtask: {missing} found; installing one with {}, this may take a minute",
        manager.name
    );
    for command in manager.before {
        if let Err(error) = call(&elevated(command, sudo)) {
            eprintln!("xtask: {error:#}; going on");
        }
    }
    call(&elevated(manager.install, sudo)).with_context(|| format!("to do it yourself: {by_hand}"))?;
    if let Some(missing) = Places::of_this_system().missing() {
        bail!("still {missing} found after the installation: {ADVICE}");
    }
    eprintln!("xtask: the Vulkan driver is installed");
    Ok(())
}

fn is_root() -> bool {
    Command::new("id")
        .arg("-u")
        .output()
        .is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Runs a command in silence; what it wrote is part of the error if it fails.
fn call(command: &[&str]) -> Result<()> {
    let [program, args @ ..] = command else {
        bail!("no command")
    };
    let line = command.join(" ");
    eprintln!("xtask: {line}");
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        bail!("`{line}` failed ({}):\n{}", output.status, said.trim_end());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A folder of its own, gone at the end of the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Result<Self> {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = env::temp_dir().join(format!("xtask-{}-{count}", std::process::id()));
            fs::create_dir_all(&path)?;
            Ok(Self(path))
        }

        fn file(&self, path: &str) -> Result<()> {
            let path = self.0.join(path);
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            Ok(fs::write(path, "{}")?)
        }

        fn places(&self) -> Places {
            Places {
                named: false,
                driver_folders: vec![self.0.join("absent"), self.0.join("icd.d")],
                library_folders: vec![self.0.join("absent"), self.0.join("lib")],
            }
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn missing_parts_are_told_apart() -> Result<()> {
        let folder = Folder::new()?;
        assert_eq!(folder.places().missing(), Some("no Vulkan loader and no driver"));
        folder.file("icd.d/lvp_icd.json")?;
        assert_eq!(folder.places().missing(), Some("no Vulkan loader"));
        folder.file("lib/libvulkan.so.1")?;
        assert_eq!(folder.places().missing(), None);
        fs::remove_file(folder.0.join("icd.d/lvp_icd.json"))?;
        assert_eq!(folder.places().missing(), Some("no Vulkan driver"));
        Ok(())
    }

    #[test]
    fn only_a_json_file_announces_a_driver() -> Result<()> {
        let folder = Folder::new()?;
        folder.file("icd.d/readme.txt")?;
        folder.file("icd.d/folder.json/file")?;
        assert!(!folder.places().has_driver());
        folder.file("icd.d/some.json")?;
        assert!(folder.places().has_driver());
        Ok(())
    }

    #[test]
    fn a_named_driver_counts() -> Result<()> {
        let folder = Folder::new()?;
        folder.file("lib/libvulkan.so.1")?;
        assert_eq!(
            Places {
                named: true,
                ..folder.places()
            }
            .missing(),
            None
        );
        Ok(())
    }

    #[test]
    fn the_loader_may_lie_in_an_architecture_folder() -> Result<()> {
        let folder = Folder::new()?;
        folder.file("lib/other/libvulkan.so.1")?;
        assert!(!folder.places().has_loader());
        folder.file("lib/x86_64-linux-gnu/libvulkan.so.1")?;
        assert!(folder.places().has_loader());
        Ok(())
    }

    #[test]
    fn the_first_known_manager_on_path_is_taken() -> Result<()> {
        let folder = Folder::new()?;
        let path = env::join_paths([folder.0.join("bin"), folder.0.join("sbin")])?;
        assert!(Manager::find(&path).is_none());
        folder.file(&format!("sbin/apk{}", env::consts::EXE_SUFFIX))?;
        assert_eq!(Manager::find(&path).map(|manager| manager.name), Some("apk"));
        folder.file(&format!("sbin/apt-get{}", env::consts::EXE_SUFFIX))?;
        assert_eq!(Manager::find(&path).map(|manager| manager.name), Some("apt-get"));
        Ok(())
    }

    #[test]
    fn sudo_asks_no_password() {
        assert_eq!(elevated(&["apk", "add"], true), ["sudo", "-n", "apk", "add"]);
        assert_eq!(elevated(&["apk", "add"], false), ["apk", "add"]);
        for manager in &MANAGERS {
            assert!(manager.install.contains(&manager.name));
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_failed_call_tells_what_was_said() {
        let error =
            call(&["sh", "-c", "echo spoken; echo cried >&2; exit 3"]).map_err(|error| error.to_string());
        assert!(error.is_err_and(|text| text.contains("spoken") && text.contains("cried")));
        assert!(call(&["true"]).is_ok());
        assert!(call(&["no-such-program-here"]).is_err());
    }
}
