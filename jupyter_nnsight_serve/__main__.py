"""`python -m jupyter_nnsight_serve`, the same as `jupyter nnsight-serve`."""

from .extension import main

main()
