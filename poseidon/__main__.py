"""`python -m poseidon`: the same as the command `poseidon`."""

from poseidon.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
