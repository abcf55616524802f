"""The paper's three tasks and others, one file each. They use the library; the library knows none of them."""
