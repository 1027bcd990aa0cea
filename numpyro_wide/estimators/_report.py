"""Report of a fit: what was decided, from which numbers, as a page of plain text."""

import logging
from dataclasses import dataclass, field
from html import escape

_logger = logging.getLogger("numpyro_wide.estimators")


@dataclass
class Report:
    """A page of headings with lines below them. Printing it gives the page; lines are logged as they come.

    Attributes:
        title: first line.
        sections: lines by heading, in the order in which they came.
    """

    title: str
    sections: dict[str, list[str]] = field(default_factory=dict)

    def add(self, heading: str, *lines: str) -> None:
        """Append lines below a heading, which is made where there is none yet.

        Args:
            heading: name of the section.
            *lines: sentences, or lines of a table.
        """
        for line in lines:
            _logger.info("%s: %s", heading, line)
        self.sections.setdefault(heading, []).extend(part for line in lines for part in line.split("\n"))

    def announce(self, line: str) -> None:
        """Say what will be done before it is begun, aloud: a long run should surprise nobody.

        Args:
            line: sentence.
        """
        _logger.warning(line)
        self.sections.setdefault("Plan", []).append(line)

    def __str__(self) -> str:
        parts = [self.title, "=" * len(self.title)]
        for heading, lines in self.sections.items():
            parts += ["", heading, *(f"  {line}" for line in lines)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<h3>{escape(self.title)}</h3>"]
        for heading, lines in self.sections.items():
            parts.append(f"<h4>{escape(heading)}</h4><pre>{escape(chr(10).join(lines))}</pre>")
        return "".join(parts)
