"""What the scripts import; AGENTS.md lists the files."""
