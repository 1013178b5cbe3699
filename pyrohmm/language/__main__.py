"""Entry point of ``python -m pyrohmm.language``, which trains and uses a language model."""

from .command import main

if __name__ == "__main__":
    main()
