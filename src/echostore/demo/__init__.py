"""The demonstration: three peers converge (`story`), and Spark comes to the same CID (`on_spark`)."""
