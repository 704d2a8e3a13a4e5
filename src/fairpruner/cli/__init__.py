"""The `fairpruner` command: every stage of the pipeline, on files. Each module adds its commands, in the order of the pipeline."""

from . import planning  # noqa: F401  # isort: skip
from . import making  # noqa: F401  # isort: skip
from . import evaluating  # noqa: F401  # isort: skip
from . import measuring  # noqa: F401  # isort: skip
from . import showing  # noqa: F401  # isort: skip
from .common import app

__all__ = ["app"]
