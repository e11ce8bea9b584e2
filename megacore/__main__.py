"""python -m megacore"""

import sys

from megacore.cli import main

sys.exit(main())
