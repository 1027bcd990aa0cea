"""Dictionary that forgets what was not asked for lately."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by key, those that were asked for last.

    Args:
        most: largest number of values.
    """

    def __init__(self, most: int):
        self.most = most
        self._values: OrderedDict[str, Value] = OrderedDict()

    def get(self, key: str, make: Callable[[], Value]) -> Value:
        """Return the value of a key, which is made where there is none.

        Args:
            key: a text: what is hashed must not change while it is kept.
            make: function that makes the value.
        """
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > self.most:
            self._values.popitem(last=False)
        return self._values[key]
