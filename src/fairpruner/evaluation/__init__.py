"""What a language model can still do: the paper's two tasks, answered in its own words, and its
perplexity on any text.
"""

from fairpruner.evaluation.perplexity import Perplexity, perplexity, read_tokens
from fairpruner.evaluation.running import Outcome, evaluate
from fairpruner.evaluation.tasks import TASKS, Task, find_files
from fairpruner.evaluation.unseen import check_text_unseen

__all__ = [
    "TASKS",
    "Outcome",
    "Perplexity",
    "Task",
    "check_text_unseen",
    "evaluate",
    "find_files",
    "perplexity",
    "read_tokens",
]
