"""``python -m pyrohmm.language`` trains a language model: see :mod:`pyrohmm.language.command`."""

from .command import main

if __name__ == "__main__":
    main()
