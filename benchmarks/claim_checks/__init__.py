"""The figures that README and docs claim, how each is measured again, and the page of results."""
