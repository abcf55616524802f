"""``python -m blockhf``."""

from blockhf.cli import main

if __name__ == "__main__":
    main()
