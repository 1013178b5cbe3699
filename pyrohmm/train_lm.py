"""The name that ``python -m pyrohmm.language`` had first: it is the same command."""

from .language.command import main

if __name__ == "__main__":
    main()
