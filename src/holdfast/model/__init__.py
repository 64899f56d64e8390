"""The model: two towers, task-dependent heads, class prompts, and the folder it is kept in."""
