"""The `fairpruner` command, also as `python -m fairpruner`, which launchers such as torchrun can start."""

import sys


def main() -> None:
    """Run the command; if a package is missing, exit with one sentence that names it."""
    try:
        from fairpruner.cli import app
        from fairpruner.cli.streams import usable_streams
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"Error: The command needs {error.name}, which is not installed: pip install 'fairpruner[cli]'."
        )
    from fairpruner.inputs.workers import defer_worker_deaths

    defer_worker_deaths()  # also while the process ends
    with usable_streams():
        app(prog_name="fairpruner")


if __name__ == "__main__":
    main()
