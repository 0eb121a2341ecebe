"""The module that is handed back: the original, whose training forward runs the lowered graphs."""
