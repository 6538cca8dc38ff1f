"""``python -m properties``. Nothing is imported before an interrupt can be told in one line."""

import sys


def main(arguments: list[str] | None = None) -> int:
    try:
        from properties.cli import main as command

        return command(arguments)
    except KeyboardInterrupt:
        print("properties: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
