"""The `fairpruner` command: every stage of the pipeline, on files.

Each module adds its commands, in the order of the pipeline.
"""

from fairpruner.cli import planning  # noqa: F401  # isort: skip
from fairpruner.cli import making  # noqa: F401  # isort: skip
from fairpruner.cli import evaluating  # noqa: F401  # isort: skip
from fairpruner.cli import measuring  # noqa: F401  # isort: skip
from fairpruner.cli import showing  # noqa: F401  # isort: skip
from fairpruner.cli.common import app

__all__ = ["app"]
