import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_login_counts'),
        ('catalog', '0012_others_on_a_device'),
        ('jobs', '0014_sharing_a_device'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AlterField(
            model_name='job',
            name='dataset',
            field=models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, to='catalog.dataset'),
        ),
        migrations.AlterField(
            model_name='job',
            name='model',
            field=models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, to='catalog.model'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['model', '-id'], name='job_of_model'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['dataset', '-id'], name='job_of_dataset'),
        ),
    ]
