"""The quality of a language model: accuracy on the paper's two tasks, and perplexity on any text."""

from fairpruner.evaluation.perplexity import Perplexity, perplexity, read_tokens
from fairpruner.evaluation.running import TaskResult, evaluate
from fairpruner.evaluation.tasks import TASKS, QuestionTask, find_files
from fairpruner.evaluation.unseen import check_text_unseen

__all__ = [
    "TASKS",
    "Perplexity",
    "QuestionTask",
    "TaskResult",
    "check_text_unseen",
    "evaluate",
    "find_files",
    "perplexity",
    "read_tokens",
]
