"""Claims about ``pooch fit`` and :func:`poochplan.fit`."""
