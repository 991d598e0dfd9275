"""`python -m poseidon`: the same as the command `poseidon`."""

from poseidon.cli.checkout import refuse_old_python

refuse_old_python()

from poseidon.cli.main import main  # noqa: E402  (an old Python cannot read it)

if __name__ == "__main__":
    raise SystemExit(main())
