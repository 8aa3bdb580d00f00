"""Makes links to files of the repository work in the built site, and its search from the disk.

A page says `[a config](../configs/quickstart.toml)`, which GitHub follows to the file. The site has
no such file, so each one that a page links to becomes a page of its own, under `source/`, and the
link goes there. A link to a file that does not exist is left as it is: mkdocs warns of it, which
ends a strict build.

The search asks for a worker, which browsers refuse to pages of the disk. The theme's remedy is a
script from elsewhere; a page without a network has no search then. `worker.js` takes its place.
"""

import re
from pathlib import Path
from posixpath import normpath, relpath
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=[)#])")
ELSEWHERE = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"></script>')
# A name in a table is not broken in the middle where a page is narrow: the table scrolls.
STYLE = "<style>.md-typeset td code { word-break: normal; overflow-wrap: normal; }</style>"
WORKER = Path(__file__).with_name("worker.js")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file outside `docs/` that some page links to."""
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(page.content_string):
            source = source_of(page, match["path"])
            if source and files.get_file_from_path(page_of(source)) is None:
                text = (REPOSITORY / source).read_text(encoding="utf-8")
                language = LANGUAGES.get(Path(source).suffix, "text")
                content = f"# {source}\n\n````{language}\n{text}````\n"
                files.append(File.generated(config, page_of(source), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Sends the page's links to such files to their pages."""
    del config, files

    def to_page(match: re.Match[str]) -> str:
        source = source_of(page.file, match["path"])
        folder = str(Path(page.file.src_uri).parent)
        return relpath(page_of(source), folder) if source else match["path"]

    if page.file.src_uri.startswith("source/"):
        return markdown
    return LINK.sub(to_page, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Puts the worker for pages of the disk and the style of tables in."""
    del config
    script = WORKER.read_text(encoding="utf-8")
    output = ELSEWHERE.sub(lambda _: f"<script>\n{script}</script>", output)
    output = output.replace("</head>", f"{STYLE}</head>", 1)
    if re.search(r'<(script|link|img)[^>]* (src|href)="https?:', output):
        raise PluginError(f"{page.file.src_uri}: something is loaded from elsewhere")
    return output


def source_of(file: File, link: str) -> str | None:
    """Returns the file that a link in `file` names, from the repository's root, if outside docs."""
    target = normpath(f"docs/{Path(file.src_uri).parent}/{unquote(link)}")
    outside = not target.startswith(("docs/", "../")) and (REPOSITORY / target).is_file()
    return target if outside else None


def page_of(source: str) -> str:
    """Returns where the page of a source file lies in the site."""
    return f"source/{source}.md"
