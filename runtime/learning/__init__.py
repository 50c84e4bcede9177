"""What is learned of the steps that follow a plan: what they take, and where that lies in one arena."""
