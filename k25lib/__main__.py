import sys

from k25lib.cli import main

sys.exit(main())
