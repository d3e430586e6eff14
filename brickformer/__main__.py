"""`python -m brickformer` is `brick`."""

import sys

from brickformer.cli import main

sys.exit(main())
