"""Reading Python source without running it: files, names, what functions refer to, and the search along it."""
