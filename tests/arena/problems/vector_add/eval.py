# The arena never runs this file: it stands for a problem's own program.
raise SystemExit("eval.py was run")
