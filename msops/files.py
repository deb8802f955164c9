"""Compares the package's files with those that pip or git recorded, and names the command that brings them back.

It imports no other module of msops, since one of them may be what is missing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.parse
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
MODULES = ".py", ".pyi", ".h", ".sh", ".mk"


def _distribution() -> importlib.metadata.Distribution | None:
    """Returns the distribution whose files the running package has; None where it runs in its source folder."""
    for distribution in importlib.metadata.distributions(name="msops"):
        if Path(str(distribution.locate_file("msops"))).resolve() == PACKAGE:
            return distribution
    return None


def recorded() -> dict[str, str]:
    """Maps each file of the package that pip installed to its digest, or to "" if pip recorded none."""
    distribution = _distribution()
    # From Python 3.12 on, `distribution.files` leaves out the files that are missing.
    record = distribution.read_text("RECORD") if distribution else ""
    return dict(re.findall(r"^msops/([^,\n]+),(?:sha256=)?([^,\n]*),", record or "", re.MULTILINE))


def changed() -> list[str]:
    """Returns the files of the package that are missing, or not as pip installed them."""
    return [file for file, digest in recorded().items() if not _is_as_recorded(PACKAGE / file, digest)]


def _is_as_recorded(path: Path, digest: str) -> bool:
    if not digest or not os.access(path, os.R_OK):
        return os.path.isfile(path)  # noqa: PTH113 (Path.is_file raises where a folder is closed)
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=") == digest


def _closed() -> list[Path]:
    """Returns the folders and modules that may not be read. The libraries have lines of their own."""
    found = []
    for folder, folders, names in os.walk(PACKAGE):
        for name in (*folders, *(name for name in names if name.endswith(MODULES))):
            path, needed = Path(folder, name), os.R_OK | (os.X_OK if name in folders else 0)
            if path != PACKAGE / "lib" and name != "__pycache__" and not os.access(path, needed):
                found.append(path)
    return found


def allow(path: Path) -> str:
    """Returns the command that opens a file, or a folder and all that is in it."""
    return f"chmod -R a+rX {shlex.quote(str(path))}  # as root or its owner"


def complaint() -> tuple[str, tuple[str, ...]]:
    """Tells which modules are closed, missing or changed, with the commands that mend it; returns ("", ()) if none is.

    Without pip's record of the files, the dist-info, nobody knows what is missing.
    """
    if closed := _closed():
        return f"{', '.join(map(str, closed))}: may not be read", tuple(map(allow, closed))
    if not source() and not _distribution():
        return "its dist-info is missing, so that pip does not know it", (reinstall(),)
    bad = [file for file in changed() if file.endswith(MODULES)]
    if bad:
        return f"{', '.join(bad)}: not as pip installed it", (reinstall(),)
    deleted = git_files("--deleted", "msops", "aot_kernels/common", "aot_kernels/compile") if source() else []
    return (f"{', '.join(deleted)}: missing", (checkout(deleted),)) if deleted else ("", ())


def source() -> Path | None:
    """Returns the source folder if the running package lies in it, else None."""
    return PACKAGE.parent if (PACKAGE.parent / "Makefile").is_file() else None


def git_files(option: str, *folders: str) -> list[str]:
    """Returns the files that `git ls-files` lists in these folders of the source folder."""
    command = ["git", "-C", str(PACKAGE.parent), "ls-files", option, *folders]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split()
    except OSError:
        return []


def checkout(files: list[str], remark: str = "") -> str:
    return f"git -C {shlex.quote(str(PACKAGE.parent))} checkout -- {shlex.join(files)}{remark}"


def reinstall(build: str = "") -> str:
    """Returns the command that installs msops again from where pip had it. `build` goes before one that compiles."""
    distribution = _distribution()
    record = json.loads((distribution.read_text("direct_url.json") if distribution else "") or "{}")
    url, remark = record.get("url", ""), ""
    path = urllib.parse.unquote(urllib.parse.urlparse(url).path) if url.startswith("file:") else ""
    if path and not Path(path).exists():
        url = ""
    elif "vcs_info" in record:  # pip wants the URL here, also of a folder
        url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    elif path:
        url = path
    if not url:
        url, remark = ".", "  # in msops' source folder"
    before = "" if url.endswith(".whl") else build
    command = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", url]
    return f"{before}{shlex.join(command)}{remark}"
