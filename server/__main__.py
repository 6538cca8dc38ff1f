"""``python -m server``."""

import sys

if __name__ == "__main__":
    try:
        from server.cli import main

        sys.exit(main())
    except KeyboardInterrupt:  # before the server has its own handlers: nothing runs yet that could be drained
        sys.exit(130)
