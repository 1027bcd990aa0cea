"""Formulas as MathML, which browsers draw themselves: a page needs no script, and no server but its own."""

import re

from docutils import nodes
from latex2mathml.converter import convert


def mathml(source: str, display: str) -> str:
    """Convert a formula of LaTeX; ``display`` is "inline" or "block"."""
    without_negative_space = source.replace(r"\!", "")  # which MathML does not know
    return convert(re.sub(r"\s+", " ", without_negative_space).strip(), display=display)


def visit_inline(self, node: nodes.math) -> None:
    """Write a formula of a sentence."""
    self.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_display(self, node: nodes.math_block) -> None:
    """Write a formula of its own line, with its number if it has one."""
    self.body.append(self.starttag(node, "div", CLASS="formula"))
    self.body.append(mathml(node.astext(), "block"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({node["number"]})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app):
    """Make the renderer known to Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
