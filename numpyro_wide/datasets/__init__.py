"""Data from local files in the form in which their publishers ship them, and small sets that come with the package.

Nothing is ever downloaded: where a file is missing, the error says what it is called and where it is had. Readers give
the numbers as they are in the files; :class:`Standardiser` (by the training rows alone) and :func:`split` make them
ready for a network.
"""

from numpyro_wide.datasets._cifar import cifar10 as cifar10
from numpyro_wide.datasets._idx import fashion_mnist as fashion_mnist
from numpyro_wide.datasets._idx import mnist as mnist
from numpyro_wide.datasets._preparation import Dataset as Dataset
from numpyro_wide.datasets._preparation import Standardiser as Standardiser
from numpyro_wide.datasets._preparation import split as split
from numpyro_wide.datasets._tables import csv_table as csv_table
from numpyro_wide.datasets._tables import diabetes as diabetes
from numpyro_wide.datasets._tables import digits as digits
from numpyro_wide.datasets._tables import marathon as marathon
from numpyro_wide.datasets._uci import uci as uci

__all__ = [
    "Standardiser",
    "cifar10",
    "csv_table",
    "diabetes",
    "digits",
    "fashion_mnist",
    "marathon",
    "mnist",
    "split",
    "uci",
]
