"""`python -m nibblas` is `nibblas`."""

from nibblas.cli import main

if __name__ == "__main__":
    main()
