"""The command by its first name: ``python -m pyrohmm.language`` is the same."""

from .language.command import main

if __name__ == "__main__":
    main()
