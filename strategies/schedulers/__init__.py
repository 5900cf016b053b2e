"""Who gets the next task, how many steps it has, and by which chain its update travels."""
