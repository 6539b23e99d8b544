"""The processes of a run: how they start, meet and exchange values, and who notices that one of them hangs."""
