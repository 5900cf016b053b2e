"""What happened in a run, folded into tables that pictures are made of: the cockpit's, and the report's."""
