"""`python -m triptych` is the same as `triptych`."""

from triptych.cli import main

raise SystemExit(main())
