"""`python -m videoaccel.cli`: the command where the script is not on the path."""

from videoaccel.cli import main

raise SystemExit(main())
