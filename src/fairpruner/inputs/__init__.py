"""What a user gives by name: models, weights, calibration data, texts; and batches of any form."""

from fairpruner.inputs.datasets import Preprocessing, Sampling, load_data
from fairpruner.inputs.hugging_face import pretrained, tokenizer_of
from fairpruner.inputs.sources import load_model
from fairpruner.inputs.text import Columns, load_text

__all__ = [
    "Columns",
    "Preprocessing",
    "Sampling",
    "load_data",
    "load_model",
    "load_text",
    "pretrained",
    "tokenizer_of",
]
