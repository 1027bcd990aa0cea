"""How the build reads pages: Python blocks as cells of a notebook, and names with a year as citations."""

import dataclasses
import os
import re
from importlib import import_module
from pathlib import Path

import nbformat
from docutils import nodes
from pybtex.database import parse_file
from pybtex.plugin import register_plugin
from pybtex.style.formatting.plain import Style as PlainStyle
from pybtex.style.labels import BaseLabelStyle
from sphinxcontrib.bibtex.plugin import register_plugin as register_reference_style
from sphinxcontrib.bibtex.style.referencing import BracketStyle
from sphinxcontrib.bibtex.style.referencing.author_year import AuthorYearReferenceStyle

HERE = Path(__file__).parent
BIBLIOGRAPHY = HERE / "references.bib"
BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(
    r"^<!---.*?^-->\n?", re.MULTILINE | re.DOTALL
)  # assertions, which the tests run
AUTODOC = re.compile(
    r"^\.\. auto(module|class|function|data)::\s+(\S+)(\n   :members:)?", re.MULTILINE
)
NOT_PROSE = re.compile(
    r"^```.*?^```$|^<!--.*?^-->$|^\$\$.*?^\$\$|`[^`\n]+`|\$[^$\n]+\$|^#.*?$",
    re.MULTILINE | re.DOTALL,
)
NUMBERS = re.compile(r"[-−+]?\d")  # what a cell begins with in a table of numbers
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def read(text: str) -> nbformat.NotebookNode:
    """Read a page as a notebook: its ``python`` blocks are the code, its other text is Markdown."""
    text = HIDDEN.sub(
        lambda match: "\n" * match[0].count("\n"), text
    )  # lines keep their numbers
    cells, lines, end = [], [], 0

    def add(cell, start):
        if cell.source.strip():
            cells.append(cell)
            lines.append(text.count("\n", 0, start))

    for block in BLOCK.finditer(text):
        add(nbformat.v4.new_markdown_cell(text[end : block.start()]), end)
        add(nbformat.v4.new_code_cell(block[1].rstrip()), block.start(1))
        end = block.end()
    add(nbformat.v4.new_markdown_cell(text[end:]), end)
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # the same in every build
    return nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": KERNEL, "source_map": lines}
    )


def without_code() -> list[str]:
    """Return patterns of the pages that have no ``python`` block, each with its folder, for ``PurePath.match``."""
    found = [
        path
        for path in HERE.rglob("*.md")
        if "_build" not in path.parts and not BLOCK.search(path.read_text())
    ]
    return [path.relative_to(HERE.parent).as_posix() for path in found]


def offer_notebook(app, docname, source):
    """Put a link to the executed notebook under the title of a page that has code."""
    is_executed = os.fspath(app.env.doc2path(docname)).endswith(
        ".md"
    ) and not docname.startswith("gallery/")
    if is_executed and BLOCK.search(source[0]):
        title, _, rest = source[0].partition("\n")
        link = f"{{nb-download}}`This page as a notebook <{docname.rpartition('/')[2]}.ipynb>`"
        source[0] = f"{title}\n\n{link}\n{rest}"


def link_figures(app, doctree, docname):
    """Make every figure of a page a link to itself at its full size."""
    root = os.path.relpath(".", os.path.dirname(docname) or ".")
    for image in list(doctree.findall(nodes.image)):
        path = Path(image["uri"])
        if "figures" in path.parts and not isinstance(image.parent, nodes.reference):
            target = f"{root}/_images/{path.name}".removeprefix("./")
            image.replace_self(nodes.reference("", "", image.deepcopy(), refuri=target))


def mark_tables(app, doctree, docname):
    """Give tables of words a class, and their cells the heads of their columns, for windows that show no columns."""
    for table in doctree.findall(nodes.table):
        rows = [
            row.children for body in table.findall(nodes.tbody) for row in body.children
        ]
        numbers = [
            NUMBERS.match(entry.astext()) is not None
            for row in rows
            for entry in row[1:]
        ]
        if 2 * sum(numbers) >= len(numbers):
            continue
        table["classes"].append("words")
        heads = [
            entry.astext()
            for head in table.findall(nodes.thead)
            for row in head.children
            for entry in row
        ]
        for row in rows:
            for head, entry in zip(heads, row, strict=False):
                if head and entry is not row[0] and entry.children and entry.astext():
                    entry[0].insert(0, nodes.inline(text=head, classes=["column-head"]))


def list_names(app, docname, source):
    """Put a table of its names, with the first line of each, under the title of a page of the API."""
    if not docname.startswith("api/"):
        return
    listed = []
    for kind, target, members in AUTODOC.findall(source[0]):
        if kind == "module":
            listed += [
                f"{target}.{name}"
                for name in getattr(import_module(target), "__all__", ())
                if members
            ]
        else:
            listed.append(target)
    if len(listed) > 1:
        title, _, rest = source[0].partition("\n")
        entries = "\n".join(f"   ~{name}" for name in dict.fromkeys(listed))
        table = (
            f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{entries}\n```\n"
        )
        source[0] = f"{title}\n\n{table}\n{rest}"


def names(entry) -> list[str]:
    """Return the surnames of an entry's authors."""
    return [
        " ".join([*person.prelast_names, *person.last_names])
        for person in entry.persons["author"]
    ]


ENTRIES = {
    key: (names(entry), entry.fields["year"])
    for key, entry in parse_file(BIBLIOGRAPHY).entries.items()
}
FIRST = "|".join(sorted({re.escape(authors[0]) for authors, _ in ENTRIES.values()}))
# Hron 2022, Hron et al. 2022, Meng and Wong (1996), Cotter, Roberts, Stuart, White 2013
CITATION = re.compile(
    rf"\b({FIRST})((?:,? et al\.)?(?:,\s[A-Z][\w\s-]+?)*(?:\s(?:and|&)\s[A-Z][\w-]+)?)\s"
    r"(?:\((\d{4})\)|\(?(\d{4})\b)"
)


def key_of(match: re.Match[str]) -> str | None:
    """Find what a match of ``CITATION`` cites: the first entry of that author and year that has all its names."""
    first, others = (
        match[1],
        set(re.findall(r"[A-Z][\w-]+(?:\s[A-Z][\w-]+)?", match[2])),
    )
    for key, (authors, year) in ENTRIES.items():
        if (
            authors[0] == first
            and year == (match[3] or match[4])
            and others <= {*authors}
        ):
            return key
    return None


def cite(text: str, role: str) -> str:
    """Turn what is in the bibliography into references to it; ``role`` is a template of a role's name and a key."""

    def reference(match):
        key = key_of(match)
        if key is None or (
            match[4] and "(" in match[0]
        ):  # "Meng and Wong (1996; ...)" stays as it is
            return match[0]
        return role.format("cite:t" if match[3] else "cite:alp", key)

    return CITATION.sub(reference, text)


def cite_in_page(app, docname, source):
    """Link the citations in the prose of a page."""
    if os.fspath(app.env.doc2path(docname)).endswith(".md"):
        parts, end = [], 0
        for match in NOT_PROSE.finditer(source[0]):
            parts += [cite(source[0][end : match.start()], "{{{}}}`{}`"), match[0]]
            end = match.end()
        source[0] = "".join([*parts, cite(source[0][end:], "{{{}}}`{}`")])
        source[0] = re.sub(
            r"\b[Ee]quations?\s+(?=\{eq\})", "", source[0]
        )  # which a reference says itself, "eq. 3"


def cite_in_docstring(app, what, name, obj, options, lines):
    """Link the citations in a docstring."""
    lines[:] = cite("\n".join(lines), ":{}:`{}`").split("\n")


class YearLabels(BaseLabelStyle):
    """Labels of the bibliography as the text cites them: first author and year."""

    def format_labels(self, sorted_entries):
        """Yield the label of each entry."""
        for entry in sorted_entries:
            authors = names(entry)
            authors = (
                f"{authors[0]} et al." if len(authors) > 2 else " and ".join(authors)
            )
            yield f"{authors}, {entry.fields['year']}"


class Style(PlainStyle):
    """The plain style with these labels."""

    default_label_style = YearLabels


@dataclasses.dataclass
class RoundBrackets(AuthorYearReferenceStyle):
    """Meng and Wong (1996), not Meng and Wong [1996]."""

    bracket_textual: BracketStyle = dataclasses.field(
        default_factory=lambda: BracketStyle(left="(", right=")")
    )


register_plugin("pybtex.style.formatting", "years", Style)
register_reference_style(
    "sphinxcontrib.bibtex.style.referencing", "years", RoundBrackets
)
