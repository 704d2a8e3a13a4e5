"""`python -m fairpruner`, which launchers such as torchrun can start."""

from fairpruner.cli import app

app(prog_name="fairpruner")
