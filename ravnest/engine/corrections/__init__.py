"""What is done about staleness: strategies behind one interface (correction.py), one file each."""
