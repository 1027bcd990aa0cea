"""One dialect of docstrings in the whole package.

As a script, for a part of it: ``python tests/test_docstrings.py numpyro_wide/elbo``.
"""

import ast
import inspect
import re
import sys
from pathlib import Path


def _words(text: str) -> set[str]:
    return set(text.split())


VERBS = _words(
    """
    accept account accumulate adapt add advance aggregate align allocate allow answer append apply approximate arrange
    ask assemble assign average back balance bin block bound break bring broadcast build cache call carry cast centre
    check choose clamp classify clear clip close collapse collect combine compare compile compose compress compute
    condition constrain continue convert copy correct count cover create cut cycle decide declare decompose decorate
    define delay descend describe detach determine differentiate digest divide double draw drop duplicate embed emit
    empty encode enter enumerate estimate evaluate exchange exclude expand export express extend extract factor feed
    fill filter find finish fit flatten flip fold follow force forget form format fuse gather generate get give go
    group guard guess halve hand handle hash hide hold identify ignore impute inform initialise insert inspect install
    integrate interpolate invert iterate join judge keep know label lay leap learn leave let lift limit linearise list
    listen load locate lock look lower make map mark mask match maximise measure merge minimise mix move multiply name
    normalise note number obey observe offer open optimise order overlap pack pad pair parametrise parse partition
    pass pick pin place plot point pool predict prepare preserve print probe process project propose protect pull push
    put quantise raise randomise rank read rebuild recognise recompute record reduce refer refine refresh refuse
    register reject release rely remember remove renew reorder repeat replace report repriorise request rescale
    reserve reset reshape resolve restart restore resume return reverse rewrite rotate round run sample save say scale
    scan score search see select send separate set shape share shift show shrink simulate size skip slice smooth solve
    sort split spread square stack standardise start state step stop store strip subsample subtract suggest sum
    summarise support swap symmetrise take talk tell temper test thin throw tile time trace track train transform
    translate transpose treat trim truncate try tune turn undo unflatten unpack unwrap update use validate vectorise
    verify wait walk warn watch weigh weight whiten whitewash widen work wrap write yield zero
    """
)
# Nouns that look like verbs, with which a file, a class or a property may begin.
NOUNS = _words(
    """
    answers bins block blocks bound bounds broadcasts caches checks copies count counts covers cut cycles digests
    draws estimate estimates factor factors fit fits forms group groups guard guesses hashes label labels limit limits
    list lists lock locks map maps mark marks mask masks match matches measure measures mixes moves name names notes
    number numbers order orders pad pair pairs place places plot plots point points pool pools probe probes process
    programs projects proposals ranks reads record records report reports runs sample samples scale scales scans score
    scores search searches shape shapes share shares shifts size sizes slice slices sort sorts split splits square
    squares stack start starts state states step steps stop stops store stores sum sums support supports switches test
    tests tile time times trace traces train transform transforms use uses walks weight weights work works wrap wraps
    zero zeros
    """
)
OPENINGS = _words(
    """
    are brings does everything gives has holds how if is knows lets means says to what when where whether which who
    whose why
    """
)
PROPER = _words(
    """
    Adam Bayes Bayesian Bernoulli Beta Binomial Brier Cauchy Cholesky Dirichlet Euclidean False Fisher Flax Fourier
    Gamma Gauss Gaussian Gram Hamiltonian Hessian Jacobian Kolmogorov Kronecker Kullback Lanczos Langevin Laplace
    Lebesgue Markov Matplotlib Mercer Monte Newton None Normal Optax Pareto Poisson Python Rademacher Stein Student
    Thouless True Uniform Wasserstein Welford Wishart
    """
)
EMPTY = re.compile(r"(likewise|ditto|as (above|before)|the same|see above)\W*", re.IGNORECASE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def offenders(paths: list[Path], package: Path = Path("numpyro_wide")) -> list[str]:
    """List what breaks the dialect, as ``file:line: what``, in the files of the paths."""
    public, files = _public_names(package), [file for path in paths for file in sorted(path.rglob("*.py")) or [path]]
    found = []
    for file in files:
        tree = ast.parse(file.read_text())
        mistakes = sorted(set(_of_module(tree, public.get(file.resolve(), set()))))
        found += [f"{file}:{line}: {what}" for line, what in mistakes]
    return found


def _public_names(package: Path) -> dict[Path, set[str]]:
    """Collect the names of every ``__all__`` by the file that defines them."""
    public: dict[Path, set[str]] = {}
    for init in package.rglob("__init__.py"):
        tree = ast.parse(init.read_text())
        listed = {
            name.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for name in ast.walk(node.value)
            if isinstance(name, ast.Constant)
        }
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                source = package.parent / node.module.replace(".", "/")
                file = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
                public.setdefault(file.resolve(), set()).update({a.asname or a.name for a in node.names} & listed)
                # A module among the exports, such as autoguide, is public as it is.
                for module in (source / f"{a.name}.py" for a in node.names if (source / f"{a.name}.py").exists()):
                    names = {getattr(n, "name", "_") for n in ast.parse(module.read_text()).body}
                    public.setdefault(module.resolve(), set()).update(n for n in names if not n.startswith("_"))
    return public


def _of_module(tree: ast.Module, public: set[str]) -> list[tuple[int, str]]:
    found = [(1, what) for what in _noun_phrase(ast.get_docstring(tree))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.Array":
            found.append((node.lineno, "write Array, from jax import Array, for jax.Array"))
        if isinstance(node, ast.Module | ast.ClassDef):
            behind = [n.lineno for n in node.body[1:] if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
            found += [(line, "describe a field in Attributes:, not behind it") for line in behind]
        if isinstance(node, Function | ast.ClassDef) and (text := ast.get_docstring(node)):
            # A function with a capital letter makes a distribution, and reads as its class would.
            is_noun = isinstance(node, ast.ClassDef) or node.name[0].isupper() or _is_decorated(node, "property")
            mistakes = _noun_phrase(text, may_ask=isinstance(node, Function)) if is_noun else _imperative(text)
            found += [(node.lineno, f"{node.name}: {what}") for what in (*mistakes, *_entries_offend(text))]
    for node in tree.body:
        found += _arguments(node, must=getattr(node, "name", None) in public)
        if isinstance(node, ast.ClassDef):
            # The arguments of a method that overrides another library's are documented there.
            for method in node.body:
                known = node.name in public and not node.bases and not getattr(method, "name", "_").startswith("_")
                found += _arguments(method, must=known)
    return found


def _is_decorated(node: ast.AST, word: str) -> bool:
    return any(word in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))


def _first_words(text: str) -> tuple[str, list[str]]:
    summary = text.splitlines()[0]
    found = [] if summary.endswith(".") else ["end the first line with a period"]
    return summary.split()[0].lower().strip(".,:;"), found


def _noun_phrase(text: str | None, *, may_ask: bool = False) -> list[str]:
    """Find fault with a summary; that of a property may begin with "Whether"."""
    if not text:
        return ["write a docstring"]
    word, found = _first_words(text)
    if may_ask and word == "whether":
        return found
    forms = {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
    if word in OPENINGS or (forms & VERBS and word not in NOUNS):
        found.append(f"begin with a noun phrase, not with {word!r} (or add it to NOUNS)")
    return found


def _imperative(text: str) -> list[str]:
    word, found = _first_words(text)
    return found if word in VERBS else [*found, f"begin with an imperative, not with {word!r} (or add it to VERBS)"]


def _entries(text: str, *sections: str) -> list[tuple[str, str]]:
    """Read the names and descriptions of sections of a docstring."""
    entries: list[tuple[str, str]] = []
    section = ""
    for line in inspect.cleandoc(text).splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            section = heading[1]
        elif line and not line.startswith(" "):
            section = ""
        elif section in sections and (entry := re.match(r" {4}([*\w.]+(?:, [*\w.]+)*):(?: (.*))?$", line)):
            entries.append((entry[1], entry[2] or ""))
        elif section in sections and entries and line.strip():
            entries[-1] = entries[-1][0], f"{entries[-1][1]} {line.strip()}".strip()
    return entries


def _entries_offend(text: str) -> list[str]:
    found = []
    for name, what in _entries(text, "Args", "Attributes", "Raises"):
        if EMPTY.fullmatch(what) or not what:
            found.append(f"say what {name!r} is, not {what!r}")
        elif (word := re.match(r"[A-Z][a-z]+\b", what)) and word[0] not in PROPER:
            found.append(f"begin {name!r} with a small letter, not with {word[0]!r} (or add it to PROPER)")
        if not what.endswith("."):
            found.append(f"end {name!r} with a period")
    return found


def _arguments(node: ast.AST, *, must: bool) -> list[tuple[int, str]]:
    """Compare the arguments that are documented with those that there are; of private ones, only those documented."""
    if isinstance(node, ast.ClassDef):
        init = next((n for n in node.body if isinstance(n, Function) and n.name == "__init__"), None)
        fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n)]
        if not init and not fields:  # another class's
            return []
        names = _names_of(init) if init else [name for name in fields if not name.startswith("_")]
        sections = ("Args",) if init else ("Args", "Attributes")
    elif isinstance(node, Function) and not _is_decorated(node, "property") and not _is_decorated(node, "overload"):
        names, sections = _names_of(node), ("Args",)
    else:
        return []
    entries = _entries(ast.get_docstring(node) or "", *sections)
    documented = [name.lstrip("*") for joint, _ in entries for name in joint.split(", ")]
    expected = names if must else [name for name in names if name in documented]
    if documented == expected:
        return []
    return [(node.lineno, f"{node.name}: document the arguments {names} in order, not {documented}")]


def _names_of(node: Function) -> list[str]:
    spec = node.args
    starred = [spec.vararg] if spec.vararg else []
    ordered = [*spec.posonlyargs, *spec.args, *starred, *spec.kwonlyargs, *([spec.kwarg] if spec.kwarg else [])]
    return [a.arg for a in ordered if a.arg not in ("self", "cls") and not a.arg.startswith("_")]


def test_docstrings_speak_one_dialect():
    """Hold every file of the package to the dialect, all offenders at once."""
    found = offenders([Path("numpyro_wide")])
    assert not found, "\n" + "\n".join(found)


WRONG = '''"""What the house holds."""
import jax
class House:
    """Holds rooms.

    Args:
        rooms: likewise.
    """
    doors: int
    """How many."""
    @property
    def address(self) -> str:
        """Return the street."""
def build(plan, *, height: jax.Array):
    """The house

    Args:
        height: Metres
    """
'''
RIGHT = '''"""Houses."""
from jax import Array
class House:
    """Rooms and doors.

    Attributes:
        doors: number of doors, (rooms,).
    """
    doors: int
    @property
    def address(self) -> str:
        """Street and number."""
def build(plan, *, height: Array):
    """Build a house.

    Args:
        plan: ``plan(room)`` of each room.
        height: height of each room in metres, (rooms,).

    Raises:
        ValueError: if a height is negative.
    """
'''


def test_each_rule_finds_its_offender():
    """Count the mistakes of a wrong file, and find none in a right one."""
    for text, expected in ((WRONG, 12), (RIGHT, 0)):
        found = _of_module(ast.parse(text), {"House", "build"})
        assert len(found) == expected, found


if __name__ == "__main__":
    found = offenders([Path(path) for path in sys.argv[1:] or ["numpyro_wide"]])
    print("\n".join(found) + f"\n{len(found)} offenders")
    sys.exit(bool(found))
