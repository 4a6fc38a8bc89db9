from lockstep.launcher.cli import main

raise SystemExit(main())
