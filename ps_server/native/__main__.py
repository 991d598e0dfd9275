"""Say whether the codecs are compiled: `python -m ps_server.native`; exit code 1 if they are not."""

from ps_server import native

if __name__ == "__main__":
    if native.LIBRARY is None:
        raise SystemExit(
            "the codecs compute with torch, because they were not compiled, or for a different "
            "version; install a C compiler (Debian: gcc and libc6-dev), then install Poseidon "
            "again"
        )
    print(f"the codecs are compiled; they use {native.LIBRARY.level.name}")
