"""Adapts the pages to the site: links that leave docs/ keep working, and anchors are those of GitHub.

On GitHub a page links to `../benchmarks/engine.md` or `../configs/quickstart.yaml`. Neither lies in docs/, so each such
target becomes a page of the site: Markdown as it is, any other text as a code block. A target that does not exist stays
a dead link, which fails `mkdocs build --strict`.
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files, InclusionLevel
from pymdownx.slugs import slugify

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")  # the path of a relative link, without its anchor
MIRRORED = ("benchmarks/*.md", "CONTRIBUTING.md")  # pages outside docs/ that stand in the navigation
PICTURES = {".svg", ".png"}


def on_config(config: MkDocsConfig) -> None:
    """Gives headings the anchors that GitHub gives them: `A, b & c` is `#a-b--c`."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/, and every file that some page links to."""
    todo = [path.relative_to(ROOT).as_posix() for pattern in MIRRORED for path in ROOT.glob(pattern)]
    todo += [target for file in files if file.src_uri.endswith(".md") for target in _outside(f"docs/{file.src_uri}")]
    seen = set()
    while todo:
        if (path := todo.pop()) in seen:
            continue
        seen.add(path)
        files.append(_mirror(path, config))
        if path.endswith(".md"):
            todo += _outside(path)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Points links that leave docs/ to the page that `on_files` made."""
    uri = page.file.src_uri
    path = f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri
    return LINK.sub(lambda link: posixpath.relpath(_on_site(_resolve(path, link[1])), posixpath.dirname(uri)), markdown)


def _resolve(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _on_site(path: str) -> str:
    """Where a file of the repository lies on the site. One that does not exist stays where the link says."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    plain = path.endswith(".md") or Path(path).suffix in PICTURES or not (ROOT / path).is_file()
    return path if plain else f"source/{path}.md"


def _outside(page: str) -> list[str]:
    """The files outside docs/ that a page links to."""
    targets = [_resolve(page, link) for link in LINK.findall((ROOT / page).read_text())]
    return [path for path in targets if not path.startswith("docs/") and (ROOT / path).is_file()]


def _mirror(path: str, config: MkDocsConfig) -> File:
    make = partial(File.generated, config, _on_site(path), inclusion=InclusionLevel.NOT_IN_NAV)
    if path.endswith(".md"):
        return File.generated(config, path, abs_src_path=str(ROOT / path))
    if Path(path).suffix in PICTURES:
        return make(abs_src_path=str(ROOT / path))
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml"}.get(Path(path).suffix, "text")
    return make(content=f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n")
