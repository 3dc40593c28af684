"""What the scripts import. From top to bottom, see AGENTS.md."""
