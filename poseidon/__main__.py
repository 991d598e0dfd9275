"""`python -m poseidon`: the same as the command `poseidon`."""

from poseidon.cli.checkout import PACKAGES, use_environment

if __name__ == "__main__":
    try:
        from poseidon.cli.main import main

        raise SystemExit(main())
    except ModuleNotFoundError as error:  # not checked earlier: some commands need few packages
        package = (error.name or "").partition(".")[0]
        if package in PACKAGES:
            use_environment(package)
        raise
