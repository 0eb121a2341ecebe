"""``python -m actsolve``."""

from __future__ import annotations

from actsolve.cli.main import main

if __name__ == "__main__":
    main()
