"""Time to import the package, over that of what it stands on."""

import statistics
import subprocess
import sys

CODE = """
import time, warnings
warnings.simplefilter("ignore")
start = time.perf_counter()
import numpyro, arviz
between = time.perf_counter()
import numpyro_wide
print(between - start, time.perf_counter() - between)
"""


def tables() -> None:
    """Make one table: both times are taken in one process, and the ratio is the median over processes."""
    seconds = []
    for _ in range(15):
        finished = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        seconds.append([float(word) for word in finished.stdout.split()])
    ratio = statistics.median((before + ours) / before for before, ours in seconds)
    before, ours = (1e3 * statistics.median(column) for column in zip(*seconds, strict=True))
    print("\n## Import: numpyro, arviz and numpyro_wide over numpyro and arviz\n")
    print("| numpyro and arviz | numpyro_wide after them | ratio | goal |")
    print("|---|---|---|---|")
    print(f"| {before:.0f} ms | {ours:.0f} ms | {ratio:.3f} | at most 1.1 |")
